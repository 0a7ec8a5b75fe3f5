"""Types and documents that several packages share, and the codec that reads and writes them."""
