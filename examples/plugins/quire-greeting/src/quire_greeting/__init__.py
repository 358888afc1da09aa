"""What a server and its command line take from a package: a command, an IO processor, a middleware."""
