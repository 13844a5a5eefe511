"""Language models with memory tables in host memory: `own_decoder`, `with_transformers`."""
