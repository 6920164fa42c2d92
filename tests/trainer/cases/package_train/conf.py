"""What the script beside it imports."""

WIDTH = 8
