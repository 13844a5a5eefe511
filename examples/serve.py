"""Serves an exported model over HTTP, with FastAPI.

EXPORT=clicks uvicorn serve:app --app-dir examples --port 8000
curl -H 'Content-Type: application/json' -d '[{"size": 1.5, "shop": "s7"}]' http://127.0.0.1:8000/predict
"""

import os
import sys
from typing import Any

from fastapi import FastAPI, HTTPException

# predict.py is part of the exported folder.
sys.path.append(os.environ["EXPORT"])
from predict import Model  # type: ignore[import-not-found]

app = FastAPI()
model = Model()


@app.post("/predict")
def predict(rows: list[dict[str, Any]]) -> list[Any]:
    """Return a prediction for each row; a response with status 400 names a missing column."""
    try:
        return model.predict(rows).tolist()
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
