"""Serves a trained model over HTTP, with FastAPI: predictions for rows, or recommendations for users.

MODEL=clicks uvicorn serve:app --app-dir examples --port 8000
curl -H 'Content-Type: application/json' -d '[{"size": 1.5, "shop": "s7"}]' http://127.0.0.1:8000/predict
curl 'http://127.0.0.1:8000/recommend?user=u1&k=3&met=i95&met=i321'     # if it was trained by retrieval
"""

import os
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query

import dphybrid

# A run, a folder that `dphybrid export` wrote, or models:/NAME@champion.
model = dphybrid.load(os.environ["MODEL"])
app = FastAPI()

if hasattr(model, "recommend"):

    @app.get("/recommend")
    def recommend(
        user: str = "",
        k: Annotated[int, Query(ge=1)] = 10,
        met: Annotated[list[str] | None, Query()] = None,
    ) -> list[dict[str, Any]]:
        """Return the k best items for a user. met: items of which training does not know that this user,
        perhaps a new one, has met them."""
        return list(model.recommend(user, k, history=met).to_dicts())

else:

    @app.post("/predict")
    def predict(rows: list[dict[str, Any]]) -> list[Any]:
        """Return a prediction for each row; a response with status 400 names a missing column."""
        try:
            return list(model.predict(rows).tolist())
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
