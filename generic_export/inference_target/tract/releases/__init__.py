"""What each release can read, and where its wheels and commands come from."""
