"""Webhooks: an endpoint is told how a job ended. Off until an operator names the hosts and the secret."""
