// Package externalscaler is the protocol of KEDA's external scalers, generated from
// externalscaler.proto by make proto.
package externalscaler
