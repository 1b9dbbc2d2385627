function __lockstep
  set -l typed (commandline -opc)
  lockstep completion fish $typed[2..] "$(commandline -ct)" 2>/dev/null | string trim
end
complete -c lockstep -a '(__lockstep)'
