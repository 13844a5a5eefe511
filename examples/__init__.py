"""Small example programs; tests/test_examples.py runs each of them."""
