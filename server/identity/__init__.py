"""Who may call: certificates, tokens, and how much each tenant may ask for."""
