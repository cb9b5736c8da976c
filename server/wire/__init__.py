"""The one call that joins a gateway and a worker; work.proto says what goes over it."""
