package wire

func appendU32(b []byte, v uint32) []byte {
	return append(b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func appendString(b []byte, s string) []byte {
	return append(append(appendU32(b, uint32(len(s))), s...), 0)
}

func appendList(b []byte, l []string) []byte {
	b = appendU32(b, uint32(len(l)))
	for _, s := range l {
		b = appendString(b, s)
	}
	return b
}

func putU32(b []byte, v uint32) {
	_ = b[3]
	b[0], b[1], b[2], b[3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
}

// reader reads values from the front of b. After the first value that does not fit, ok is false and
// every further value is zero.
type reader struct {
	b  []byte
	ok bool
}

func (r *reader) next(n int) []byte {
	if !r.ok || n < 0 || n > len(r.b) {
		r.ok = false
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) u8() byte {
	if v := r.next(1); r.ok {
		return v[0]
	}
	return 0
}

func (r *reader) u32() uint32 {
	if v := r.next(4); r.ok {
		return uint32(v[0]) | uint32(v[1])<<8 | uint32(v[2])<<16 | uint32(v[3])<<24
	}
	return 0
}

func (r *reader) u64() uint64 {
	lo := uint64(r.u32())
	return lo | uint64(r.u32())<<32
}

func (r *reader) bytes() []byte { return r.next(int(r.u32())) }

// text returns a string with its terminating zero byte.
func (r *reader) text() []byte { return r.next(int(r.u32()) + 1) }

// checked returns a text without any other zero byte, at which the kernel would end the string.
func (r *reader) checked() []byte {
	v := r.text()
	for i, c := range v {
		if (c == 0) != (i == len(v)-1) {
			r.ok = false
			return nil
		}
	}
	return v
}

// since returns a reader of the bytes read since all was left.
func (r *reader) since(all []byte) reader { return reader{b: all[:len(all)-len(r.b)], ok: true} }

func (r *reader) strings() Strings {
	n := r.u32()
	all := r.b
	for i := uint32(0); i < n && r.ok; i++ {
		r.checked()
	}
	return Strings{N: int(n), rest: r.since(all)}
}

func (r *reader) files() Files {
	n := r.u32()
	all := r.b
	for i := uint32(0); i < n && r.ok; i++ {
		r.file()
	}
	return Files{rest: r.since(all)}
}

func (r *reader) file() OrderFile {
	return OrderFile{Path: r.checked(), Mode: r.u32(), Owner: r.u8(), Content: r.bytes()}
}

func (r *reader) mounts() Mounts {
	n := r.u32()
	all := r.b
	for i := uint32(0); i < n && r.ok; i++ {
		r.mount()
	}
	return Mounts{rest: r.since(all)}
}

func (r *reader) mount() OrderMount {
	return OrderMount{Source: r.checked(), Target: r.checked(), Type: r.checked(), Flags: r.u32(), Options: r.checked()}
}
