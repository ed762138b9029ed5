"""What can be done with a vault from a shell? One module a question; `app` puts them together."""
