"""Several processes that train one model: ranks, messages, gradients and shards."""
