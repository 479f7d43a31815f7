//! What Rekindle's parts say to each other: the ring, the commands, the control messages.
