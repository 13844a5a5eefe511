"""Tables: CSV, TSV and Parquet files read in chunks, their columns' roles, and the encoder from cells to ids
and numbers."""
