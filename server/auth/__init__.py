"""Authentication and quotas: certificates, tokens, and how much each tenant may ask for."""
