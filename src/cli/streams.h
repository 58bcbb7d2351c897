// Secures the standard streams, before anything else.
#pragma once

namespace leeway {

// Call first in main. Closed descriptors 0 to 2 are replaced by ones that fail on reading and
// writing, so that no file opened later receives output meant for the user. A reader that
// disappears (SIGPIPE) or a file size limit (SIGXFSZ) causes a failed write instead of ending the
// program; child programs must get the defaults of both back.
void secure_standard_streams();

}  // namespace leeway
