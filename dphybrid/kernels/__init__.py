"""The C kernels of tables and of dropout, compiled at installation, and their library. Needs torch alone."""
