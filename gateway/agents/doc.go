// Package agents carries out what the agents of surfaces need of this server, with the rights and limits of an
// API key: programs in containers, files of containers and of organisations, and batches of requests.
package agents
