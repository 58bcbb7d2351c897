// The standard streams, before anything else.
#pragma once

namespace leeway {

// Call first in main. Descriptors 0 to 2 that were closed lead nowhere from then on: reading and
// writing them fails, and no file that is opened later gets what is said to the user. A reader that
// goes away (SIGPIPE) or a limit on file sizes (SIGXFSZ) is a failed write, not the program's end;
// programs that are started must get the default of both back.
void secure_standard_streams();

}  // namespace leeway
