"""The run time: packages, sessions, cache, scheduler, sampler, tokenizer."""
