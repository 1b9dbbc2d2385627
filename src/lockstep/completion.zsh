_lockstep() {
  local -a found
  found=("${(@f)$(lockstep completion zsh "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  [[ -n $found ]] && compadd -Q -S '' -- $found || _files
}
compdef _lockstep lockstep
