"""Who may ask what: keys, rates, origins and TLS."""
