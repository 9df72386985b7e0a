"""A FAKE of SGLang's launch command, for starts, deaths and hangs on cue. It models nothing."""
