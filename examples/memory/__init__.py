"""Language models with memory tables in host memory: `own_decoder`, `row_adapter`, `with_transformers`."""
