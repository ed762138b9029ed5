"""What is done to a vault beside storing and searching? Jobs, erasure, transfer."""
