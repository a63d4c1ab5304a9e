"""HTTP below the routes: connections, bodies and answers as raw ASGI."""
