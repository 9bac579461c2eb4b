package cron

import (
	"testing"
	"time"
)

func BenchmarkNext(b *testing.B) {
	for _, c := range []struct{ name, cron, zone string }{
		{"each minute", "* * * * *", "UTC"},
		{"each minute, Berlin", "* * * * *", "Europe/Berlin"},
		{"daily, Berlin", "30 2 * * *", "Europe/Berlin"},
		{"daily, Casablanca", "30 2 * * *", "Africa/Casablanca"},
		{"yearly", "@yearly", "Europe/Berlin"},
		{"once in 28 years", "0 0 * 2 FRI#5", "Europe/Berlin"},
	} {
		e, err := Parse(c.cron)
		if err != nil {
			b.Fatal(err)
		}
		zone, err := time.LoadLocation(c.zone)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(c.name, func(b *testing.B) {
			at := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
			for b.Loop() {
				if at, err = e.Next(at, zone); err != nil {
					b.Fatal(err)
				}
				if at.Year() > 2200 {
					at = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
				}
			}
		})
	}
}
