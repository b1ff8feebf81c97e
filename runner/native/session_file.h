// A conversation in a file, in the format of runner/session_file.py.
#pragma once

#include <string>

#include "cached_tokens.h"
#include "session.h"

namespace eagle3 {

/// Writes the state of `session`, whose caches hold the tokens of `cached`. `artifact` is the artifact's sha256 in
/// hexadecimal digits. Throws Refused.
Saved save_session(
    const std::string& path, Session& session, const CachedTokens& cached, const std::string& artifact,
    const std::string& note);

/// Reads a file that `save_session` or the Python runner wrote, and writes its state into `session`. Throws Refused;
/// whatever is wrong is found before anything is written.
Saved resume_session(const std::string& path, Session& session, CachedTokens& cached, const std::string& artifact);

}  // namespace eagle3
