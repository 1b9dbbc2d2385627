_lockstep() {
  local line="${COMP_LINE:0:COMP_POINT}" IFS=$' \t\n'
  local current="${line##* }"
  local -a typed=($line)
  [[ -z $current ]] && typed+=("")
  IFS=$'\n'
  COMPREPLY=($(lockstep completion bash "${typed[@]:1}" 2>/dev/null))
  COMPREPLY=("${COMPREPLY[@]#"${current%"${current##*=}"}"}")  # bash replaces what follows the =
}
complete -o default -o nospace -F _lockstep lockstep
