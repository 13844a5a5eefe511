"""Small programs; tests/test_examples.py runs each of them."""
