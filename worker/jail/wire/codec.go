package wire

func appendU32(b []byte, v uint32) []byte {
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func appendU64(b []byte, v uint64) []byte {
	return appendU32(appendU32(b, uint32(v)), uint32(v>>32))
}

func appendString(b []byte, s string) []byte {
	return append(appendU32(b, uint32(len(s))), s...)
}

func appendList(b []byte, l []string) []byte {
	b = appendU32(b, uint32(len(l)))
	for _, s := range l {
		b = appendString(b, s)
	}
	return b
}

// reader takes values off the front of b; after the first that does not fit,
// ok is false and every further value is zero.
type reader struct {
	b  []byte
	ok bool
}

func (r *reader) take(n int) []byte {
	if !r.ok || n < 0 || n > len(r.b) {
		r.ok = false
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) u8() byte {
	if v := r.take(1); r.ok {
		return v[0]
	}
	return 0
}

func (r *reader) u32() uint32 {
	if v := r.take(4); r.ok {
		return uint32(v[0]) | uint32(v[1])<<8 | uint32(v[2])<<16 | uint32(v[3])<<24
	}
	return 0
}

func (r *reader) u64() uint64 {
	lo := uint64(r.u32())
	return lo | uint64(r.u32())<<32
}

func (r *reader) bytes() []byte { return r.take(int(r.u32())) }

// count reads a list's count; a member takes at least 4 bytes, so a count that
// cannot fit is refused before anything is allocated for it.
func (r *reader) count() int {
	n := int(r.u32())
	if n > len(r.b)/4 {
		r.ok = false
		return 0
	}
	return n
}

func (r *reader) list() []string {
	n := r.count()
	if n == 0 {
		return nil
	}
	l := make([]string, 0, n)
	for i := 0; i < n && r.ok; i++ {
		l = append(l, string(r.bytes()))
	}
	return l
}
