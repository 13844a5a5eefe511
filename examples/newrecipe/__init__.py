"""Recipe newrecipe: which rating a user gives to an item."""
