"""What each task is taught by."""
