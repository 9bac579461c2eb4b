package proto

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Bytes is an amount of data. Its text and JSON form is a string: a number of bytes, or one with a
// unit of KiB, MiB or GiB.
type Bytes int64

// The units of [Bytes].
const (
	KiB Bytes = 1 << (10 * (iota + 1))
	MiB
	GiB
)

type byteUnit struct {
	name string
	size Bytes
}

func byteUnits() []byteUnit { return []byteUnit{{"GiB", GiB}, {"MiB", MiB}, {"KiB", KiB}} }

// String formats b in the largest unit that divides it.
func (b Bytes) String() string {
	for _, u := range byteUnits() {
		if b >= u.size && b%u.size == 0 {
			return strconv.FormatInt(int64(b/u.size), 10) + u.name
		}
	}
	return strconv.FormatInt(int64(b), 10)
}

// MarshalText implements [encoding.TextMarshaler].
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// UnmarshalText parses the text of [Bytes.String]. A space before the unit is allowed.
func (b *Bytes) UnmarshalText(text []byte) error {
	number, size := string(text), Bytes(1)
	for _, u := range byteUnits() {
		if rest, ok := strings.CutSuffix(number, u.name); ok {
			number, size = strings.TrimSuffix(rest, " "), u.size
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n < 0 || n > math.MaxInt64/int64(size) {
		return fmt.Errorf("%q must be a number of bytes, or one with KiB, MiB or GiB, such as 16MiB", text)
	}
	*b = Bytes(n) * size
	return nil
}
