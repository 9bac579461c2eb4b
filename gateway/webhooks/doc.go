// Package webhooks has the routes of webhooks: the settings of API keys, the deliveries of
// executions, and the URLs at which deliveries fail.
package webhooks
