"""Where the real one has its flags: an edit of it makes what was kept stale."""
