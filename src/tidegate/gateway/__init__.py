"""HTTP front of many engines: it carries requests and answers; which engine serves whom is `routing`'s decision."""
