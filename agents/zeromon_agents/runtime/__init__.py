"""The agent, and what keeps it harmless: guard, patches, hook context, bootstrap, rendezvous."""
