# usage: mutations.pl <list> <sources> check | tests <name>... | apply <name> | survives <name>
#
# Reads tests/mutations.list, whose head says what a mutation consists of. check: each can be made in those sources, all
# that cannot are named. tests: prints theirs, a line each. apply: makes one of them there. survives: status 0 if it may.
use strict;
use warnings;

my ($list, $sources, $mode, @names) = @ARGV;

sub text_of {
    my ($path) = @_;
    open my $in, '<', $path or die "$path: $!\n";
    local $/;
    return scalar <$in>;
}

# The blocks by name, in their order: each with its tests and its changes, a change being [file, function, old, new].
sub read_block {
    my ($name, $lines) = @_;
    my ($file, $function, %block) = (undef, undef, name => $name, changes => []);
    while (defined(my $line = shift @$lines)) {
        if    ($line =~ /^file: (\S+)$/)     { $file = $1; undef $function }
        elsif ($line =~ /^function: (\w+)$/) { $function = $1 }
        elsif ($line =~ /^tests: (.+)$/)     { $block{tests} = $1 }
        elsif ($line =~ /^survives: (.+)$/)  { $block{survives} = $1 }
        elsif ($line =~ /^replace: (.+?) ==>(?: (.*))?$/) {
            push @{$block{changes}}, [$file, $function, $1, $2 // ''];
        } elsif ($line eq '<<<<') {
            my @text = ([], []);
            push @{$text[0]}, $line while @$lines && ($line = shift @$lines) ne '====';
            push @{$text[1]}, $line while @$lines && ($line = shift @$lines) ne '>>>>';
            push @{$block{changes}}, [$file, $function, map { join "\n", @$_ } @text];
        } elsif ($line ne '') { die "$name: what is '$line'?\n" }
    }
    die "$name: no file, no tests or no change\n" unless $file && $block{tests} && @{$block{changes}};
    return \%block;
}

sub read_list {
    my ($head, @blocks) = split /^mutation: /m, text_of($list);
    my (@read, %seen);
    for (@blocks) {
        my ($name, @lines) = split /\n/;
        die "$name: its name is another's too\n" if $seen{$name}++;
        push @read, read_block($name, \@lines);
    }
    return @read;
}

# Where a function's definition begins and ends: from its first line, at column 0, to the brace that closes it there.
sub span_of {
    my ($body, $file, $function) = @_;
    return (0, length $body) unless defined $function;
    my @found;
    push @found, [$-[0], $+[0] - $-[0]]
        while $body =~ /^[A-Za-z_][^\n;{}]*\b\Q$function\E\([^;{}]*\)\n\{\n.*?^\}$/msg;
    die scalar @found . " functions $function in $file\n" if @found != 1;
    return @{$found[0]};
}

sub change {
    my ($body, $file, $function, $old, $new) = @_;
    my ($start, $length) = span_of($body, $file, $function);
    my $part = substr $body, $start, $length;
    my $places = () = $part =~ /\Q$old\E/g;
    die "'$old' is $places times in " . (defined $function ? "$function of " : '') . "$file\n" if $places != 1;
    substr $part, index($part, $old), length $old, $new;
    substr $body, $start, $length, $part;
    return $body;
}

my %original;

# The changed files by name.
sub apply {
    my ($block) = @_;
    my %changed;
    for (@{$block->{changes}}) {
        my ($file, $function, $old, $new) = @$_;
        $original{$file} //= text_of("$sources/$file");
        $changed{$file} = change($changed{$file} // $original{$file}, $file, $function, $old, $new);
    }
    return %changed;
}

sub check_tests {
    for (split ' ', $_[0]{tests}) {
        my ($test) = split /:/;
        my @sources = glob("$sources/tests/*/$test.c");
        push @sources, glob("$sources/tests/cpp/$1.cpp") if $test =~ /^cpp_(\w+)$/;
        die "there is no test $test\n" unless @sources || $test =~ /^(relacy_handovers|preload)$/;
    }
}

my @blocks = read_list();
if ($mode eq 'check') {
    my $bad = 0;
    for my $block (@blocks) {
        next if eval { apply($block); check_tests($block); 1 };
        print "$block->{name}: $@";
        $bad++;
    }
    print scalar @blocks, " mutations, $bad cannot be made\n";
    exit($bad > 0);
}
my %named = map { $_->{name} => $_ } @blocks;
my @chosen = map { $named{$_} // die "no mutation $_\n" } @names;
if ($mode eq 'tests') {
    print "$_->{tests}\n" for @chosen;
    exit 0;
}
exit !$chosen[0]{survives} if $mode eq 'survives';
my %changed = apply($chosen[0]);
for my $file (sort keys %changed) {
    open my $out, '>', "$sources/$file" or die "$file: $!\n";
    print $out $changed{$file};
}
