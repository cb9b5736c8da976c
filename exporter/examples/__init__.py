"""Complete programs of people whose models are none of ours: trained, exported, asked."""
