"""The stores, one a file; `base` has the verbs, `table` what they mean, `protocol` the bytes of `tcp`."""
