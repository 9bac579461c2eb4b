#compdef bullpen
_bullpen() {
	local -a found
	local line
	for line in ${(f)"$(${words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"}; do
		found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
	done
	if (($#found)); then
		_describe bullpen found
	else
		_files
	fi
}
if [ "$funcstack[1]" = _bullpen ]; then
	_bullpen "$@"
else
	compdef _bullpen bullpen
fi
