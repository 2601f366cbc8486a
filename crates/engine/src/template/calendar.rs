//! `strftime_now`: the date and time that some templates print.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// The maximum of bytes of a format.
pub(super) const FORMAT_BYTES_MAX: usize = 1024;

/// Formats `now` as `strftime` does; unknown directives are copied unchanged.
pub(super) fn format(now: SystemTime, format: &str) -> String {
    // A time before 1970 counts as 1970.
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day, day_of_year) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let half = if hour % 12 == 0 { 12 } else { hour % 12 };
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[(days % 7) as usize]);
    let mut out = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            out.push(letter);
            continue;
        }
        let mut directive = letters.next();
        let bare = directive == Some('-');
        if bare {
            directive = letters.next();
        }
        let width = if bare { 1 } else { 2 };
        // Writing to a string cannot fail.
        let _ = match directive {
            Some('Y') => write!(out, "{year:04}"),
            Some('y') => write!(out, "{:0width$}", year % 100),
            Some('m') => write!(out, "{month:0width$}"),
            Some('d') => write!(out, "{day:0width$}"),
            Some('e') => write!(out, "{day:2}"),
            Some('j') => write!(out, "{day_of_year:03}"),
            Some('H') => write!(out, "{hour:0width$}"),
            Some('I') => write!(out, "{half:0width$}"),
            Some('M') => write!(out, "{minute:0width$}"),
            Some('S') => write!(out, "{second:0width$}"),
            Some('p') => write!(out, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('B') => write!(out, "{month_name}"),
            Some('b' | 'h') => write!(out, "{}", &month_name[..3]),
            Some('A') => write!(out, "{day_name}"),
            Some('a') => write!(out, "{}", &day_name[..3]),
            Some('F') => write!(out, "{year:04}-{month:02}-{day:02}"),
            Some('D' | 'x') => write!(out, "{month:02}/{day:02}/{:02}", year % 100),
            Some('T' | 'X') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('R') => write!(out, "{hour:02}:{minute:02}"),
            Some('c') => write!(
                out,
                "{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year:04}",
                &day_name[..3],
                &month_name[..3]
            ),
            Some('Z') => write!(out, "UTC"),
            Some('z') => write!(out, "+0000"),
            Some('%') => write!(out, "%"),
            Some(other) => write!(out, "%{other}"),
            None => write!(out, "%"),
        };
    }
    out
}

/// Returns year, month, day and day of the year of a day counted from 1970-01-01.
fn civil(mut days: u64) -> (u64, u64, u64, u64) {
    // 400 years have 146,097 days; the rest is counted year by year, at most 400 of them.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    loop {
        let length = if leap(year) { 366 } else { 365 };
        if days < length {
            break;
        }
        days -= length;
        year += 1;
    }
    let day_of_year = days + 1;
    let february = if leap(year) { 29 } else { 28 };
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1, day_of_year)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn prints_dates() {
        let at = |seconds: u64, text: &str| format(UNIX_EPOCH + Duration::from_secs(seconds), text);
        assert_eq!(
            at(0, "%Y-%m-%d %H:%M:%S %A %j"),
            "1970-01-01 00:00:00 Thursday 001"
        );
        assert_eq!(at(951_782_400, "%d %b %Y, %a"), "29 Feb 2000, Tue");
        assert_eq!(
            at(1_735_689_599, "%B %-d, %y %I:%M %p %j"),
            "December 31, 24 11:59 PM 366"
        );
        assert_eq!(
            at(951_782_400, "%c|%x|%X|%R"),
            "Tue Feb 29 00:00:00 2000|02/29/00|00:00:00|00:00"
        );
        assert_eq!(at(4_107_542_400, "%F%%%Q%"), "2100-03-01%%Q%");
    }
}
