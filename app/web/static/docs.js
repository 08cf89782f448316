// Shows /openapi.json. No validator badge: it would send the schema to somebody else's server.
SwaggerUIBundle({ url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
