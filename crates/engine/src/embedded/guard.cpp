// Runs a call into llama.cpp and ends there what it throws: an exception must not reach a caller that is not C++, which would end
// the process.

#include <cstddef>
#include <cstring>
#include <exception>

// 0 if the call returned. Otherwise `what` holds the reason, cut to `room` bytes with the zero behind it.
extern "C" int sapwood_guard(void (*call)(void *), void * data, char * what, std::size_t room) {
    const char * reason = "an exception that says nothing";
    try {
        call(data);
        return 0;
    } catch (const std::exception & thrown) {
        // The text lives no longer than the exception.
        std::strncpy(what, thrown.what(), room - 1);
    } catch (...) {
        std::strncpy(what, reason, room - 1);
    }
    what[room - 1] = '\0';
    return 1;
}
