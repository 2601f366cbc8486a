//! [`LogBuffer`]: what the callbacks of one step print, within a limit (AI-608).

/// Bytes printed; over the limit the oldest quarter is dropped.
#[derive(Debug, Default)]
pub(super) struct LogBuffer {
    bytes: Vec<u8>,
}

impl LogBuffer {
    /// Adds printed bytes. Old ones are dropped a quarter at a time, so that a flood does not move the buffer at each
    /// call.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        // What would be dropped again at once is never copied: a guest may print all of its memory.
        let bytes = &bytes[bytes.len().saturating_sub(LOG_BYTES_MAX)..];
        let over = (self.bytes.len() + bytes.len()).saturating_sub(LOG_BYTES_MAX);
        if over > 0 {
            let quarters = over.div_ceil(LOG_DROP_BYTES) * LOG_DROP_BYTES;
            self.bytes.drain(..quarters.min(self.bytes.len()));
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// Adds what is printed after an error: here the newest is dropped, so that the error stays.
    pub(super) fn push_after_error(&mut self, bytes: &[u8]) {
        let space = LOG_BYTES_MAX.saturating_sub(self.bytes.len());
        self.bytes
            .extend_from_slice(&bytes[..bytes.len().min(space)]);
    }

    /// Takes the text. Invalid UTF-8, also where a drop cut a character, is replaced.
    pub(super) fn take(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.bytes).into_owned();
        self.bytes.clear();
        text
    }
}

/// Printed bytes of one step.
pub(super) const LOG_BYTES_MAX: usize = 64 << 10;
const LOG_DROP_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ai_608_over_the_limit_the_oldest_quarter_goes() {
        let mut log = LogBuffer::default();
        log.push(&[b'a'; LOG_BYTES_MAX - 1]);
        log.push(b"b");
        assert_eq!(log.bytes.len(), LOG_BYTES_MAX);
        log.push(b"c");
        assert_eq!(log.bytes.len(), LOG_BYTES_MAX - LOG_DROP_BYTES + 1);
        assert!(log.take().ends_with("abc"));
        assert_eq!(log.take(), "");
    }

    #[test]
    fn ai_608_one_large_print_keeps_its_end() {
        let mut log = LogBuffer::default();
        log.push(b"old");
        let mut text = vec![b'x'; 3 * LOG_BYTES_MAX];
        text.push(b'!');
        log.push(&text);
        let text = log.take();
        assert_eq!(text.len(), LOG_BYTES_MAX);
        assert!(text.ends_with("x!"));
    }

    #[test]
    fn ai_608_after_an_error_the_newest_goes() {
        let mut log = LogBuffer::default();
        log.push(&[b'a'; LOG_BYTES_MAX - 2]);
        log.push_after_error(b"bcd");
        assert!(log.take().ends_with("abc"));
        log.push(b"\xe9\xff");
        assert_eq!(log.take(), "\u{fffd}\u{fffd}");
    }
}
