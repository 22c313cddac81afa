"""TLS between tasks: the transport, the certificates, and the authority that issues them."""
