"""Jobs and model servers: their queue, their processes, what is known of them."""
