"""What `dphybrid bench` measures on the user's own machine."""
