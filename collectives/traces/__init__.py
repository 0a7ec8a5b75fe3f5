"""What a running or ended job left of its collectives: readers of others' formats, typed and bounded."""
