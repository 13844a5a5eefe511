"""Serves an exported model over HTTP, with FastAPI: predictions for rows, or recommendations for users.

EXPORT=clicks uvicorn serve:app --app-dir examples --port 8000
curl -H 'Content-Type: application/json' -d '[{"size": 1.5, "shop": "s7"}]' http://127.0.0.1:8000/predict
curl 'http://127.0.0.1:8000/recommend?user=u1&k=3&met=i95&met=i321'     # if it was trained by retrieval
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query

# The exported folder has a program, predict.py or recommend.py.
folder = Path(os.environ["EXPORT"])
sys.path.append(str(folder))
recommends = (folder / "recommend.py").is_file()
app = FastAPI()
model = import_module("recommend" if recommends else "predict").Model()

if recommends:

    @app.get("/recommend")
    def recommend(
        user: str = "",
        k: Annotated[int, Query(ge=1)] = 10,
        met: Annotated[list[str] | None, Query()] = None,
    ) -> dict[str, Any]:
        """Return the k best items for a user. met: items of which training does not know that this user,
        perhaps a new one, has met them."""
        return dict(model.recommend([user], k, [met or []])[0])

else:

    @app.post("/predict")
    def predict(rows: list[dict[str, Any]]) -> list[Any]:
        """Return a prediction for each row; a response with status 400 names a missing column."""
        try:
            return list(model.predict(rows).tolist())
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
