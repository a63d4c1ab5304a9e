"""What each task is taught by. One objective a file."""
