"""Tables: CSV, TSV and Parquet files that are read in chunks, the roles of their columns, and the encoder
that turns cells into ids and numbers."""
